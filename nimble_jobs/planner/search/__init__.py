"""The search for the fastest plan that agrees with eager."""
