"""What an interrupted training goes on from: its state, copied and written while it runs, found and put back."""
