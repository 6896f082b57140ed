"""What is proven of a build."""
