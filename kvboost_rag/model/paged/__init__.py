"""KV in pages: a pool on the device, cold pages in host memory or on disk, exact attention over all of them."""
