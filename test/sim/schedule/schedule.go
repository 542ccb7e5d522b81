// Package schedule orders the events of a simulated world: one queue of events, a clock
// that jumps from event to event, and nodes that stand still or end. The same sequence of
// calls gives the same order of events.
package schedule

import "container/heap"

// A Node is a process of the world.
type Node interface {
	// Condition returns the node's life, which grows with each end (events of an earlier
	// life are void), and the time in milliseconds until which the node stands still.
	Condition() (life int, paused int64)
}

// Event is a function that runs at a time on a node.
type Event struct {
	At   int64  // ms
	N    uint64 // order of making, among events of the same time
	Do   func()
	node Node // nil: the world itself
	life int  // the node's life when the event was made
}

// Queue has the events to come.
type Queue struct {
	Now  int64 // ms
	made uint64
	next events
}

// At runs do on a node (nil: in the world itself) at a time, unless the node's life ends
// first.
func (q *Queue) At(at int64, n Node, do func()) {
	e := &Event{At: at, N: q.made, Do: do, node: n}
	if n != nil {
		e.life, _ = n.Condition()
	}
	q.made++
	heap.Push(&q.next, e)
}

// First returns the time of the next event; false if no event is left.
func (q *Queue) First() (at int64, ok bool) {
	if len(q.next) == 0 {
		return 0, false
	}
	return q.next[0].At, true
}

// Next advances to the next event. e is nil if the life of the event's node has ended, or
// if the event must wait because its node stands still; ok is false if no event was left.
func (q *Queue) Next() (e *Event, ok bool) {
	if len(q.next) == 0 {
		return nil, false
	}
	e = heap.Pop(&q.next).(*Event)
	q.Now = e.At
	if e.node == nil {
		return e, true
	}
	life, paused := e.node.Condition()
	if life != e.life {
		return nil, true
	}
	if paused > q.Now {
		e.At = paused
		heap.Push(&q.next, e) // the event keeps its order among the waiting events
		return nil, true
	}
	return e, true
}

type events []*Event

func (q events) Len() int { return len(q) }
func (q events) Less(i, j int) bool {
	return q[i].At < q[j].At || q[i].At == q[j].At && q[i].N < q[j].N
}
func (q events) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *events) Push(x any)   { *q = append(*q, x.(*Event)) }
func (q *events) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}
