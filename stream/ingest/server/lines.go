package server

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// lines reads lines with bounded memory.
type lines struct {
	in  *bufio.Reader
	buf []byte // a line that is longer than the buffer of in
}

// newLines reads the lines of r.
func newLines(r io.Reader) *lines { return &lines{in: bufio.NewReaderSize(r, 16<<10)} }

// next returns the next line without its end, LF or CR LF, valid until the next call. long
// reports that the line has more than most bytes; the line is then skipped. The last line
// needs no end. Errors: io.EOF after the last line, and those of the reader.
func (l *lines) next(most int) (line []byte, long bool, err error) {
	l.buf = l.buf[:0]
	for {
		p, err := l.in.ReadSlice('\n')
		if !long && len(l.buf)+len(p) > most+2 {
			long, l.buf = true, l.buf[:0]
		}
		if errors.Is(err, bufio.ErrBufferFull) || errors.Is(err, io.EOF) && len(l.buf) > 0 {
			if !long {
				l.buf = append(l.buf, p...)
			}
			if errors.Is(err, bufio.ErrBufferFull) {
				continue
			}
			p = nil
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, false, err
		}
		if long {
			return nil, true, nil
		}
		if len(l.buf) > 0 {
			l.buf = append(l.buf, p...)
			p = l.buf
		}
		if len(p) == 0 {
			return nil, false, io.EOF
		}
		p, ended := bytes.CutSuffix(p, []byte("\n"))
		if ended {
			p, _ = bytes.CutSuffix(p, []byte("\r"))
		}
		if len(p) > most {
			return nil, true, nil
		}
		return p, false, nil
	}
}
