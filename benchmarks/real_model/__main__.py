"""`python -m benchmarks.real_model FILE.gguf`."""

from benchmarks.real_model.run import main

main()
