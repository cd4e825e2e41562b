"""What the store holds, as JSON rows and as words. The command line and the dashboard both show them.

Nothing here prints, and nothing here changes the store.
"""
