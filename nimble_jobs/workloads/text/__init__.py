"""Jobs whose records are texts: tokens, buckets, and the windows in which records are sorted by length."""
