"""A small trained model shipped with the project, and the data that it knows."""
