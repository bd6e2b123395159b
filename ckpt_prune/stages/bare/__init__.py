"""The stage `bare`: blocks lose their attention and a part of their MLP, and are trained to do without (DC-ViT)."""
