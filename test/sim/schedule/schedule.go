// Package schedule orders what happens in a simulated world: one queue of
// events, a clock that jumps from one to the next, and nodes that stand still or
// end. What is asked for in the same order happens in the same order.
package schedule

import "container/heap"

// A Node is a process of the world.
type Node interface {
	// Condition is the node's life, which grows with each end (events of an
	// earlier life are void), and until when it stands still, in milliseconds.
	Condition() (life int, paused int64)
}

// Event is something that happens.
type Event struct {
	At   int64  // ms
	N    uint64 // order of making, among those of one time
	Do   func()
	node Node // nil: the world itself
	life int  // of the node, when it was made
}

// Queue holds what is to come.
type Queue struct {
	Now  int64 // ms
	made uint64
	next events
}

// At lets do happen on a node (nil: in the world itself) at a time, unless the
// node's life ends first.
func (q *Queue) At(at int64, n Node, do func()) {
	e := &Event{At: at, N: q.made, Do: do, node: n}
	if n != nil {
		e.life, _ = n.Condition()
	}
	q.made++
	heap.Push(&q.next, e)
}

// First is when the next event is due; false when there is none.
func (q *Queue) First() (at int64, ok bool) {
	if len(q.next) == 0 {
		return 0, false
	}
	return q.next[0].At, true
}

// Next goes on to the next event. It is nil if its node's life ended, or if it
// has to wait because its node stands still; false when there was none.
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
		heap.Push(&q.next, e) // keeps its place among those that wait
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
