"""What a training resumes from: its state, copied and written while it runs, and restored by a later attempt."""
