"""Version 1 of the wire contract: zen.v1.GenerateService and zen.v1.VariantService."""
