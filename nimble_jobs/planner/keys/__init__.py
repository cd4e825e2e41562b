"""What is asked for, and the key under which its schedule is kept."""
