"""adapters/server"""
