"""What one job does; one file per task."""
