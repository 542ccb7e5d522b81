package hold

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// Version is the version of the protocol between a process and the holder.
const Version = 1

// packet is a request or an answer; each operation sets the fields it needs.
type packet struct {
	Op         string           `json:"op"`
	Version    int              `json:"version,omitempty"`
	Name       string           `json:"name,omitempty"`
	Replace    bool             `json:"replace,omitempty"`
	Connection uint64           `json:"connection,omitempty"` // put: the kernel's connection number
	Command    *Command         `json:"command,omitempty"`
	Process    *process.Process `json:"process,omitempty"`
	Patience   int64            `json:"patience,omitempty"` // hello: the holder's, milliseconds
	Found      bool             `json:"found,omitempty"`
	Kind       meta.Kind        `json:"kind,omitempty"`
	Error      string           `json:"error,omitempty"`
	Mounts     []Mount          `json:"mounts,omitempty"`
	More       bool             `json:"more,omitempty"` // list: mounts follow after the last
}

const (
	maxPacket = 256 << 10
	// maxPut leaves room for the other fields beside a Command in the answer to show.
	maxPut = maxPacket - 32<<10
	// maxList bounds the bytes of mounts in one packet of a list.
	maxList = 64 << 10
)

func (p *packet) encode() []byte {
	b, err := json.Marshal(p)
	if err != nil {
		panic("hold: a packet is plain data: " + err.Error())
	}
	return b
}

// writeIn bounds the wait of a packet for the reader.
const writeIn = 5 * time.Second

func writePacket(c *net.UnixConn, b []byte, fds ...*os.File) error {
	var oob []byte
	if len(fds) > 0 {
		var n []int
		for _, f := range fds {
			n = append(n, int(f.Fd()))
		}
		oob = unix.UnixRights(n...)
	}
	if err := c.SetWriteDeadline(time.Now().Add(writeIn)); err != nil {
		return err
	}
	_, _, err := c.WriteMsgUnix(b, oob, nil)
	return err
}

// readPacket reads one packet. The caller must close the descriptors.
func readPacket(c *net.UnixConn) (*packet, []*os.File, error) {
	b, oob := make([]byte, maxPacket), make([]byte, unix.CmsgSpace(4*8))
	n, on, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, nil, err
	}
	if n == 0 {
		return nil, nil, net.ErrClosed
	}
	fds, err := rightsOf(oob[:on])
	if err != nil {
		return nil, nil, err
	}
	p, err := decodePacket(b[:n])
	if err != nil {
		closeAll(fds)
		return nil, nil, err
	}
	return p, fds, nil
}

// decodePacket errors: Protocol.
func decodePacket(b []byte) (*packet, error) {
	p := new(packet)
	if err := json.Unmarshal(b, p); err != nil {
		return nil, meta.E("hold", meta.Protocol, "", err)
	}
	return p, nil
}

func rightsOf(oob []byte) (l []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			closeAll(l)
			return nil, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			l = append(l, os.NewFile(uintptr(fd), "held"))
		}
	}
	return l, nil
}

func closeAll(l []*os.File) {
	for _, f := range l {
		if f != nil {
			f.Close()
		}
	}
}

// peerOf returns the user and process id of the other end; pid is 0 if the process is in a
// process namespace invisible to this process.
func peerOf(c *net.UnixConn) (uid, pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if cerr != nil || err != nil {
		return 0, 0, errors.Join(cerr, err)
	}
	return int(cred.Uid), int(cred.Pid), nil
}

// trusted fails unless the other end belongs to the same user, or to root.
func trusted(c *net.UnixConn) (pid int, err error) {
	uid, pid, err := peerOf(c)
	if err == nil && uid != os.Geteuid() && uid != 0 {
		err = meta.E("hold", meta.NotPermitted, "", fmt.Errorf("the process at the other end is of user %d, this one of %d", uid, os.Geteuid()))
	}
	return pid, err
}

// roomy sizes the send buffer for the largest packet. A packet must fit into the send buffer
// as a whole, and the default size is smaller.
func roomy(c *net.UnixConn) { _ = c.SetWriteBuffer(maxPacket) }
