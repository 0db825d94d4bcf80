"""One file per method with a part to train; harness.train_heads calls them."""
