"""The probe: public features and a privately trained linear layer; it labels and accepts images."""
