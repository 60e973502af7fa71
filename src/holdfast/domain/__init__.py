"""The vocabulary of Holdfast as plain values: frozen, slotted, standard library only. Reading it is reading the protocol."""
