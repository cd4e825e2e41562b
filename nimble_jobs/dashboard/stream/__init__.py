"""The stream of changes to open pages, as server-sent events. One poller reads the store for all of them."""
