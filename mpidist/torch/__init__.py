"""torch.distributed over a Communicator: ``init_process_group("mpidist")``.

``mpidist_torch_entry`` beside the package registers it when torch is imported; nothing else imports this room.
"""
