"""Rules over problem sizes: features, decision tree, time model, learning."""
