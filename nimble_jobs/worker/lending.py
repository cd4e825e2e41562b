"""A training on several GPUs gets them from the other posts of its worker, which have their devices back at its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nimble_jobs.worker.post import Post

GIVEN_BACK = "its device was lent to another job, which asked for several devices before it did"


def lend(posts: Sequence[Post]) -> None:
    """Take devices back that no job asks for any more, and lend idle ones to jobs that ask, in the order in which they
    did.

    A job that gets too few keeps those, and the next device to become idle is its own. Jobs that asked later would wait
    for it, and it for them: they go back to the queue.
    """
    asking = {post.running.job.id: post for post in posts if post.running and post.running.borrows}
    wishes = {job: wish for job, post in asking.items() if post.running and (wish := post.running.borrows)}
    for post in posts:
        if post.lent is not None and (post.lent not in wishes or post.device not in wishes[post.lent].devices):
            post.take_back()

    def lack(job: str) -> int:
        return wishes[job].count - sum(post.lent == job for post in posts)

    order = sorted(wishes, key=lambda job: asking[job].running.borrows_since)  # type: ignore[union-attr]
    for place, job in enumerate(order):
        wanted = wishes[job].devices
        for post in [each for each in posts if each.idle and each.may_lend(wanted)][: max(0, lack(job))]:
            post.lend(job)
        if lack(job) <= 0:
            continue
        for other in order[:place:-1]:
            if lack(job) > 0 and lack(other) > 0 and (got := _held(posts, other, wanted)):
                asking[other].give_back(GIVEN_BACK)
                for post in got[: lack(job)]:
                    post.lend(job)
        return  # whatever becomes idle is for this job


def _held(posts: Sequence[Post], job: str, wanted: Collection[str]) -> list[Post]:
    """Those of these devices that a job runs on, or has borrowed."""
    own = [post for post in posts if post.running and post.running.job.id == job and post.may_lend(wanted)]
    return own + [post for post in posts if post.lent == job and post.device in wanted]
