"""The only place that touches Hugging Face internals; refuses what it cannot prove."""
