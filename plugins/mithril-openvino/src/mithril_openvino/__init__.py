"""The OpenVINO backend of mithril: programs are models of OpenVINO."""
