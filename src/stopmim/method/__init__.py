"""The paper: positions, encoder, predictor, masks, targets, and how a config builds them."""
