"""The transfer context of workers that let the server copy."""
