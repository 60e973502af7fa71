"""The values that the components of Holdfast exchange: frozen, slotted dataclasses, with the standard library only."""
