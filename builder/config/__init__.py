"""The options of a build, validated once."""
