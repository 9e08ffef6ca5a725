"""All that is to be seen and measured on a GPU, in one command: `python -m benchmarks.gpu.run_all`."""
