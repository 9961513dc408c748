"""What is said about the tests, measured."""
