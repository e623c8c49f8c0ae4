"""Converters of models that embed texts and images, or pages."""
