"""From text to text: the one way of every AI call to the scheduler."""
