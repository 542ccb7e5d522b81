package fuse

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// A program appends records to a stream by writing lines to in.jsonl. A WRITE is answered when the
// mount has the bytes; a goroutine of each open file cuts the bytes into lines, and sends the lines
// to a gateway. fsync(2) and close(2) wait until the gateway has acknowledged all whole lines.
//
// An open file appends as a producer with a name, and each line has a number. So a line that is
// sent again, by this process or by a successor, is in the stream once. For a successor the memory
// (package keep) has the bytes of each WRITE, and, for each open file, the name, how many bytes are
// done, and the number of the next line. Lines are cut by the bytes alone, so that the successor
// gives each line the same number.

// InputName names the producer of an open in.jsonl.
type InputName struct {
	Name string
	// Next is the number of the next line, of 1 or more. The lines with the numbers from Next to
	// Promised-1 may have been sent before.
	Next, Promised int64
	Partition      int32 // of the lines; -1: not chosen yet
}

// StreamInput appends lines to a stream.
type StreamInput interface {
	// Append appends lines, and waits until the lines are durable. refused says why the stream does
	// not take the first one of the lines that it does not take; the other lines are appended. After
	// an error the lines may be in the stream, and the StreamInput must not be used again. Errors:
	// NotFound (the stream was removed), AccessDenied, NoSpace, QuotaExceeded, Unavailable (ctx has
	// ended, and no gateway had acknowledged the lines).
	Append(ctx context.Context, lines [][]byte) (partition int32, refused, err error)
	Close()
}

// Bounds of an open in.jsonl.
const (
	maxLine = 1 << 20 // bytes of a line without its end, as of a record
	// inputRoom is the number of bytes from which on a WRITE waits: so many are always more than the
	// beginning of a line. A WRITE has at most 1 MiB.
	inputRoom  = maxLine + 2
	batchLines = 1000
	batchBytes = 512 << 10
	// inputPatience is how long lines wait for a gateway before the lines are given up.
	inputPatience = 2 * time.Minute
	// inputIdle is how long an open file without new lines keeps a connection to a gateway.
	inputIdle = 10 * time.Second
	maxInputs = 1024 // open at the same time in a mount
)

// inputs are the open files in.jsonl of a mount.
type inputs struct {
	wg     sync.WaitGroup // of the goroutines of open files
	unsafe UnsafeLines

	mu    sync.Mutex
	open  map[uint64]*input
	nonce uint64                   // of names that this process gives
	given uint16                   // names
	free  map[uint64][]*inputTaken // names of closed files, by node
}

// inputTaken is a name with the state of its producer. A name is used again, since a partition
// remembers each name for days.
type inputTaken struct {
	id        uint64 // nonce<<16 | number
	next      int64
	partition int32
}

func (n *inputTaken) name() string { return fmt.Sprintf("mount-%012x-%d", n.id>>16, n.id&0xffff) }

// input is an open in.jsonl.
type input struct {
	s        *streamFiles
	node, fh uint64
	opened   uint64 // number of the OPEN
	opener   uint32 // process; 0: unknown

	mu      sync.Mutex
	changed chan struct{} // closed at each change of the fields below
	inputTaken
	done     uint64      // bytes that are appended, refused or given up
	text     []byte      // behind them
	parts    []inputPart // the WRITEs of text, in order, and the last WRITE
	written  uint64      // number of the last WRITE
	promised int64       // as InputName.Promised
	skipping bool        // the text is in a line that is too long
	released bool
	failed   error // to be returned by the next request
	slot     keep.Slot
}

// inputPart is the record of a WRITE.
type inputPart struct {
	end    uint64
	slot   keep.Slot
	buffer []byte
}

// UnsafeLines switches safety mechanisms of in.jsonl off, as a positive control.
type UnsafeLines struct {
	NoAck    bool // fsync and close do not wait for acknowledgements
	NewNames bool // a successor gives open files names of its own
}

// isInput reports whether a node is an in.jsonl.
func isInput(node uint64) bool {
	kind, _, _ := streamOf(node)
	return kind == streamInput
}

// openInput opens an in.jsonl.
func (s *streamFiles) openInput(ctx request, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	switch {
	case s.streams == nil:
		return fuse.EPERM
	case in.Flags&syscall.O_ACCMODE != syscall.O_WRONLY:
		return fuse.EACCES
	case in.Flags&syscall.O_APPEND == 0:
		return fuse.EPERM
	case !s.streams.HasInput(ctx):
		s.f.log.Warn("a program can't append to a stream, because the mount finds no gateway at which it can log in; start a gateway with --ingest, or mount with --gateway", "node", in.NodeId)
		return fuse.Status(syscall.EOPNOTSUPP)
	}
	unique := in.Unique &^ resent
	if in.Unique&resent != 0 {
		s.inputs.undo(unique)
	}
	i := &input{s: s, node: in.NodeId, opened: unique, opener: processOf(in.Pid), changed: make(chan struct{})}
	if !s.inputs.name(i) {
		return fuse.Status(syscall.ENFILE)
	}
	// A stream has no position: the kernel neither counts one, nor locks one while a WRITE waits.
	out.Fh, out.OpenFlags = s.f.opens.handle(modeVirtual), fuse.FOPEN_DIRECT_IO|fuse.FOPEN_STREAM
	i.fh = out.Fh
	i.start()
	return fuse.OK
}

// name gives an open file a name. ok is false if too many files are open.
func (l *inputs) name(i *input) (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.open) >= maxInputs {
		return false
	}
	if n := len(l.free[i.node]); n > 0 {
		i.inputTaken = *l.free[i.node][n-1]
		l.free[i.node] = l.free[i.node][:n-1]
		return true
	}
	for l.nonce == 0 || l.given == 1<<16-1 {
		var b [8]byte
		rand.Read(b[:]) // never fails
		l.nonce, l.given = binary.NativeEndian.Uint64(b[:])>>16, 0
	}
	i.inputTaken = inputTaken{id: l.nonce<<16 | uint64(l.given), next: 1, partition: -1}
	l.given++
	return true
}

// start notes an open file for a successor, and starts its goroutine.
func (i *input) start() {
	i.mu.Lock()
	i.note()
	i.mu.Unlock()
	l := &i.s.inputs
	l.mu.Lock()
	if l.open == nil {
		l.open, l.free = map[uint64]*input{}, map[uint64][]*inputTaken{}
	}
	l.open[i.fh] = i
	l.mu.Unlock()
	l.wg.Go(i.run)
}

// undo ends the open file that a predecessor gave to an OPEN, but could not answer.
func (l *inputs) undo(unique uint64) {
	for _, i := range l.all() {
		if i.opened == unique {
			i.release()
		}
	}
}

func (l *inputs) all() (all []*input) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, i := range l.open {
		all = append(all, i)
	}
	return all
}

// input returns an open file. Errors: IO.
func (s *streamFiles) input(fh uint64) (*input, error) {
	s.inputs.mu.Lock()
	defer s.inputs.mu.Unlock()
	if i := s.inputs.open[fh]; i != nil {
		return i, nil
	}
	return nil, meta.E("append", meta.IO, inputName, errors.New("the mount's process does not know the open file"))
}

// note notes the state for a successor: the new record is written before the old one is erased. Of
// two records the successor takes the later one. The caller holds mu.
func (i *input) note() {
	k := i.s.f.kept.keep
	if k == nil {
		return
	}
	state := i.done << 10
	if i.released {
		state |= 1 << 9
	}
	if i.skipping {
		state |= 1 << 8
	}
	if i.failed != nil {
		state |= uint64(meta.KindOf(i.failed)) & 0xff
	}
	old := i.slot
	i.slot = k.Note(keep.Record{Kind: keep.Input, Aux: i.opener, N: [6]uint64{
		i.node, i.fh, i.opened, i.id, uint64(i.next)<<16 | uint64(uint16(i.partition+1)), state,
	}})
	k.Erase(old)
}

// change wakes all that wait for a change. The caller holds mu.
func (i *input) change() {
	close(i.changed)
	i.changed = make(chan struct{})
}

// tell returns the failure that no request has returned yet. The caller holds mu.
func (i *input) tell() error {
	err := i.failed
	if err != nil {
		i.failed = nil
		i.note()
	}
	return err
}

// take takes the bytes of a WRITE, and notes them for a successor. The caller holds mu.
func (i *input) take(p []byte, unique uint64) {
	part := inputPart{end: i.done + uint64(len(i.text)+len(p))}
	if k := i.s.f.kept.keep; k != nil {
		if part.buffer = k.Buffer(len(p)); part.buffer != nil {
			part.buffer = append(part.buffer, p...)
		}
		part.slot = k.Note(keep.Record{Kind: keep.Line, N: [6]uint64{i.fh, part.end - uint64(len(p)), unique, uint64(len(p)), k.Place(part.buffer)}})
	}
	i.text, i.parts, i.written = append(i.text, p...), append(i.parts, part), unique
	i.forget()
	i.change()
}

// forget erases the records of WRITEs whose bytes are done, beside the last record, which has the
// number of the last WRITE. The caller holds mu.
func (i *input) forget() {
	n := 0
	for ; n < len(i.parts)-1 && i.parts[n].end <= i.done; n++ {
		i.erase(i.parts[n])
	}
	i.parts = slices.Delete(i.parts, 0, n)
}

func (i *input) erase(p inputPart) {
	k := i.s.f.kept.keep
	k.Erase(p.slot)
	k.Recycle(p.buffer)
}

// writeInput answers a WRITE.
func (s *streamFiles) writeInput(ctx request, in *fuse.WriteIn, p []byte) (uint32, error) {
	i, err := s.input(in.Fh)
	if err != nil {
		return 0, err
	}
	unique := in.Unique &^ resent
	i.mu.Lock()
	defer i.mu.Unlock()
	if in.Unique&resent != 0 && unique == i.written {
		return uint32(len(p)), nil // the predecessor took the bytes, and could not answer
	}
	for i.failed == nil && len(i.text) >= inputRoom {
		if err := i.wait(ctx); err != nil {
			return 0, err
		}
	}
	if err := i.tell(); err != nil {
		return 0, err
	}
	i.take(p, unique)
	if in.Flags&syscall.O_DSYNC != 0 {
		// After a signal the program would write the bytes again.
		return uint32(len(p)), i.settle(context.Background())
	}
	return uint32(len(p)), nil
}

// wait waits for a change; the caller holds mu, which wait gives up meanwhile. Errors: Interrupted.
func (i *input) wait(ctx context.Context) error {
	changed := i.changed
	i.mu.Unlock()
	defer i.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return meta.E("append", meta.Interrupted, inputName, nil)
	}
}

// settle waits until all whole lines are done, and returns the failure to be told. The caller holds
// mu.
func (i *input) settle(ctx context.Context) error {
	end := i.done + uint64(bytes.LastIndexByte(i.text, '\n')+1)
	for i.done < end && !i.s.inputs.unsafe.NoAck {
		if err := i.wait(ctx); err != nil {
			return err
		}
	}
	return i.tell()
}

// fsyncInput answers an FSYNC.
func (s *streamFiles) fsyncInput(ctx request, fh uint64) error {
	i, err := s.input(fh)
	if err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.settle(ctx)
}

// flushInput answers a FLUSH, which the kernel sends when a process closes a descriptor. A last line
// without an end is a line when the process that opened the file closes a descriptor. A process that
// inherited a descriptor may have written only a part of a line, and does not wait: execve(2) of
// another program closes such descriptors, too. No signal ends the wait, since a program does not
// repeat a close(2).
func (s *streamFiles) flushInput(in *fuse.FlushIn) error {
	i, err := s.input(in.Fh)
	if err != nil {
		return err
	}
	closer := processOf(in.Pid)
	i.mu.Lock()
	defer i.mu.Unlock()
	if closer != i.opener && closer != 0 && i.opener != 0 {
		return nil
	}
	i.endLine()
	return i.settle(context.Background())
}

// endLine ends the last line. The caller holds mu.
func (i *input) endLine() {
	if n := len(i.text); n > 0 && i.text[n-1] != '\n' || n == 0 && i.skipping {
		i.take([]byte{'\n'}, i.written)
	}
}

// release answers the last close(2): the goroutine appends the rest, and ends.
func (i *input) release() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.endLine()
	i.released = true
	i.note()
	i.change()
}

// cut returns the lines of the next batch, and the number of bytes that the batch uses up. long
// reports that the bytes have a line that is too long, which is not among the lines. inside reports
// that the bytes end in such a line.
func cut(text []byte, skipping bool) (lines [][]byte, used int, long, inside bool) {
	size := 0
	for len(lines) < batchLines && size < batchBytes {
		n := bytes.IndexByte(text[used:], '\n')
		if n < 0 {
			if rest := len(text) - used; skipping || rest > maxLine+1 { // the end may be CR LF
				return lines, len(text), long || !skipping, true
			}
			return lines, used, long, false
		}
		line := bytes.TrimSuffix(text[used:used+n], []byte{'\r'})
		switch used += n + 1; {
		case skipping:
			skipping = false
		case len(line) > maxLine:
			long = true
		case len(line) > 0:
			lines, size = append(lines, line), size+len(line)
		}
	}
	return lines, used, long, false
}

// count returns the number of lines in a text.
func count(text []byte, skipping bool) (n int64) {
	for {
		lines, used, _, inside := cut(text, skipping)
		if n += int64(len(lines)); used == 0 {
			return n
		}
		text, skipping = text[used:], inside
	}
}

// run appends lines until the file is released and all lines are done.
func (i *input) run() {
	var to StreamInput // nil: not connected
	end := func() {
		if to != nil {
			to.Close()
			to = nil
		}
	}
	defer end()
	idle := time.NewTimer(inputIdle)
	defer idle.Stop()
	for {
		i.mu.Lock()
		lines, used, long, inside := cut(i.text, i.skipping)
		changed, released := i.changed, i.released
		name := InputName{Name: i.name(), Next: i.next, Promised: i.promised, Partition: i.partition}
		i.mu.Unlock()
		switch {
		case used == 0 && released:
			i.finish()
			return
		case used == 0:
			idle.Reset(inputIdle)
			select {
			case <-changed:
			case <-idle.C:
				end()
			}
			continue
		}
		var refused, err error
		partition := name.Partition
		if len(lines) > 0 {
			partition, refused, err = i.send(&to, name, lines)
		}
		if err != nil {
			end()
		}
		if long {
			refused = cmp.Or[error](refused, meta.E("append", meta.TooBig, inputName, fmt.Errorf("a line has more than %d bytes", maxLine)))
		}
		i.advance(used, len(lines), inside, partition, refused, err)
	}
}

// send appends lines, and connects first. Errors: as of StreamInput.Append.
func (i *input) send(to *StreamInput, name InputName, lines [][]byte) (partition int32, refused, err error) {
	_, id, dir := streamOf(i.node)
	if *to == nil {
		if *to, err = i.s.streams.Input(id, dir, name); err != nil {
			return name.Partition, nil, err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), inputPatience)
	defer cancel()
	return (*to).Append(ctx, lines)
}

// advance notes what became of a batch of lines. After an error, all whole lines are given up: the
// lines behind a gap would come into the stream otherwise.
func (i *input) advance(used, lines int, inside bool, partition int32, refused, err error) {
	_, id, dir := streamOf(i.node)
	i.mu.Lock()
	defer i.mu.Unlock()
	if err != nil {
		used = bytes.LastIndexByte(i.text, '\n') + 1
		lines, inside = int(count(i.text[:used], i.skipping)), false
		i.s.f.log.Error("lines that programs wrote to a stream are given up; the next write, fsync or close of the program fails", "volume", id, "directory", dir, "lines", lines, "err", err)
	}
	if refused != nil {
		i.s.f.log.Warn("a stream refuses lines; the next write, fsync or close of the program fails", "volume", id, "directory", dir, "err", refused)
	}
	i.done += uint64(used)
	i.text = i.text[used:]
	if len(i.text) == 0 {
		i.text = nil
	}
	i.next += int64(lines)
	i.partition, i.skipping = max(i.partition, partition), inside
	i.failed = cmp.Or(i.failed, err, refused)
	i.note()
	i.forget()
	i.change()
}

// finish forgets a released file without lines, and frees its name.
func (i *input) finish() {
	i.mu.Lock()
	for _, p := range i.parts {
		i.erase(p)
	}
	i.s.f.kept.keep.Erase(i.slot)
	name := i.inputTaken
	i.mu.Unlock()
	l := &i.s.inputs
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, i.fh)
	l.free[i.node] = append(l.free[i.node], &name)
}

// restoreInputs opens the files of a predecessor again. The text of a file without the bytes of a
// WRITE, which found no room in the memory, is given up.
func (s *streamFiles) restoreInputs(left []keep.Record, read func(keep.Record) []byte) {
	last := map[uint64]keep.Record{}
	parts := map[uint64][]keep.Record{}
	for _, r := range left {
		switch r.Kind {
		case keep.Input:
			last[r.N[1]] = r
		case keep.Line:
			parts[r.N[0]] = append(parts[r.N[0]], r)
		}
	}
	for fh, r := range last { // in any order
		i := &input{
			s: s, node: r.N[0], fh: fh, opened: r.N[2], opener: r.Aux, changed: make(chan struct{}),
			inputTaken: inputTaken{id: r.N[3], next: int64(r.N[4] >> 16), partition: int32(uint16(r.N[4])) - 1},
			done:       r.N[5] >> 10, released: r.N[5]&(1<<9) != 0, skipping: r.N[5]&(1<<8) != 0,
		}
		if kind := meta.Kind(r.N[5] & 0xff); kind != 0 {
			i.failed = meta.E("append", kind, inputName, errors.New("an earlier process of the mount could not append lines"))
		}
		i.restore(parts[fh], read)
		if s.inputs.unsafe.NewNames {
			s.inputs.name(i)
			i.promised = 0
		}
		i.start()
	}
}

// restore takes the bytes of a predecessor's WRITEs, before the file is used.
func (i *input) restore(parts []keep.Record, read func(keep.Record) []byte) {
	slices.SortStableFunc(parts, func(a, b keep.Record) int { return cmp.Compare(a.N[1], b.N[1]) })
	for n, r := range parts {
		at, end, next := r.N[1], r.N[1]+r.N[3], i.done+uint64(len(i.text))
		switch p := read(r); {
		case end > next && at <= next && p != nil:
			i.take(p[next-at:], r.N[2])
		case end > next:
			// Each lost byte may have ended a line that a gateway has.
			i.next += int64(end - i.done)
			i.done, i.text = end, nil
			i.failed = meta.E("append", meta.IO, inputName, errors.New("bytes that an earlier process of the mount had taken found no room in the memory for a successor"))
			i.take(nil, r.N[2])
		case n == len(parts)-1:
			i.take(nil, r.N[2]) // for the number of the WRITE, which the kernel may send again
		}
	}
	i.promised = i.next + count(i.text, i.skipping)
}

// settle waits until the lines of released files are done, for some time at most.
func (l *inputs) settle(most time.Duration) {
	done := make(chan struct{})
	go func() { // ends when each file is released and its lines are done or given up
		l.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(most):
	}
}

// processOf returns the process of a thread; 0: unknown.
func processOf(thread uint32) uint32 {
	b, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(thread), 10) + "/status")
	if err != nil {
		return thread
	}
	for line := range strings.Lines(string(b)) {
		if text, ok := strings.CutPrefix(line, "Tgid:"); ok {
			if n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32); err == nil {
				return uint32(n)
			}
		}
	}
	return thread
}
