"""AWQ checkpoints (``version: gemm``), read and run without autoawq or gptqmodel."""
