package server

import "penstock.io/penstock/meta/task"

// tasks are an owner's background tasks, each in a goroutine of its own.
type tasks struct {
	aging      *task.Task // of the cached records
	checkpoint *task.Task
	collection *task.Task // of unreferenced chunks
	compaction *task.Task
	departures *task.Task // of ended sessions with open-ended files
	digests    *task.Task
	indexes    *task.Task
	inspection *task.Task
	promotion  *task.Task // of a clone; runs in clones only
	snapshots  *task.Task
	usage      *task.Task // of snapshots
}

func newTasks(o *owner) tasks {
	return tasks{
		aging:      newAgingTask(&o.kernel),
		checkpoint: newCheckpointTask(&o.checkpoints),
		collection: newCollectionTask(o),
		compaction: newCompactionTask(&o.compaction),
		departures: newDepartureTask(o),
		digests:    newDigestTask(o),
		indexes:    newIndexTask(o),
		inspection: newInspectionTask(o),
		promotion:  newPromotionTask(o),
		snapshots:  newSnapshotTask(o),
		usage:      newUsageTask(o),
	}
}

// startTasks starts the tasks of a volume; the tasks run until the owner ends. All tasks
// except departures wait until the previous owner's sessions are back or over.
func (o *owner) startTasks(clone bool) {
	o.wg.Go(func() { o.tasks.departures.Run(o.ctx) })
	o.wg.Go(func() {
		defer o.srv.repairs.forget(&o.repairing)
		o.runTask(o.tasks.inspection)
	})
	for _, t := range []*task.Task{o.tasks.aging, o.tasks.collection, o.tasks.compaction, o.tasks.checkpoint, o.tasks.snapshots, o.tasks.usage} {
		o.wg.Go(func() { o.runTask(t) })
	}
	if o.srv.digestsHere() {
		o.wg.Go(func() { o.runTask(o.tasks.digests) })
	}
	if o.srv.cfg.ChunkWriter != nil {
		o.wg.Go(func() { o.runTask(o.tasks.indexes) })
	}
	if clone {
		o.wg.Go(func() { o.runTask(o.tasks.promotion) })
	}
}
