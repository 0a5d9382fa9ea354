from benchmarks.world import World
def rows(world: World): return iter(())
