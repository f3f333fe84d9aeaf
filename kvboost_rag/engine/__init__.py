"""The life of a request: render, match, tokenise, prefix, look up, compose, repair, decode, report."""
