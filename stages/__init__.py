"""How wcpipe is run: one command a stage, over artifacts on disk. What is computed lives in `pipeline`."""
