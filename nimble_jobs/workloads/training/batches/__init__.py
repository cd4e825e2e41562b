"""From records to batches on the device: in which order, read, checked, decoded, uploaded and changed."""
