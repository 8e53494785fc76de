"""The transfer context of workers that copy themselves."""
