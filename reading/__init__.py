"""Find where a model's writing begins in a text, with our models and Hugging Face's."""
