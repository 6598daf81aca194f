"""Live receivers: a model that an engine serves from, brought from version to version in the memory where it lies.

    from dcr_cli.live import Receiver

    receiver = Receiver(model, model.load_weights, checkpoint="step-6")
    receiver.learn()                        # before it serves: this disturbs it, and puts it back
    receiver.stage("s3://bucket/run@7")     # it may serve meanwhile
    receiver.apply()                        # it may not

It needs torch, as comparing on a CUDA device does, and nothing else here.
"""

from dcr_cli.live.member import Fate, Member
from dcr_cli.live.ready import Staged
from dcr_cli.live.receiver import Receiver
from dcr_cli.live.shares import Shares, content_of

__all__ = ["Fate", "Member", "Receiver", "Shares", "Staged", "content_of"]
