"""Operators of the domain ai.onnx.ml: models and preparations of scikit-learn, XGBoost, LightGBM."""
