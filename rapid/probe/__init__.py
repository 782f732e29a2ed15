"""The probe: public features, and a linear layer on them that is trained privately; it labels and accepts images."""
