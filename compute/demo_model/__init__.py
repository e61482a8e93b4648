"""A small trained model shipped with the project, with its data, training and evaluation."""
