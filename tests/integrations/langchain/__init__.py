"""LangChain: standard suites, the plain swap, and what users complain about."""
