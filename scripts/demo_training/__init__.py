"""How the demo model is made: its texts, tokenizer, training, measurements and packaging (see train_demo_model.py)."""
