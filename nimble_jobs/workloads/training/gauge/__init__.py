"""What a training measures: gathered from the device, kept, written for others, drawn."""
