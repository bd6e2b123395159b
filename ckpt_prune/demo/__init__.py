"""The small trained model the package carries, and the text it is calibrated and measured on."""
