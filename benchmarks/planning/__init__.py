"""Which devices a model, contexts of a length and objectives want: `kvcommons plan`."""
