"""What is shown of rollouts, measured or simulated: figures, timeline, picture, table."""
