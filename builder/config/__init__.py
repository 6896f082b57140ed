"""What a build was asked for, validated once."""
