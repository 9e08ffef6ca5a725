from benchmarks.path.run import main

main()
