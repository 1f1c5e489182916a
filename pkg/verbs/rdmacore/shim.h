// The functions of libibverbs and librdmacm that Go calls, with types that hold no Go pointer.
#ifndef NFSRDMAD_RDMACORE_SHIM_H
#define NFSRDMAD_RDMACORE_SHIM_H

#include <stdint.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

// A function that returns int returns 0 or a negative errno, unless its comment says otherwise.

// rc_load opens the libraries. If that fails it writes the cause to reason, which has size bytes.
int rc_load(char *reason, int size);

// struct rc_event is a copy of a connection event. Destroying its connection id waits until the
// event is acknowledged, so the id cannot be reused before.
struct rc_event {
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct rdma_cm_id *listener;
	int32_t kind;
	int32_t status;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t private_len;
	uint8_t private_data[256];
};

int rc_open_channel(struct rdma_event_channel **out);
void rc_close_channel(struct rdma_event_channel *ch);
// rc_next_event returns -EAGAIN if there is no event. The channel must be non-blocking.
int rc_next_event(struct rdma_event_channel *ch, struct rc_event *out);
void rc_ack_event(struct rc_event *ev);

// Connection ids. Addresses are struct sockaddr_in or sockaddr_in6. Timeouts are in milliseconds.
int rc_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **out);
int rc_destroy_id(struct rdma_cm_id *id);
int rc_resolve_addr(struct rdma_cm_id *id, void *addr, int timeout);
int rc_resolve_route(struct rdma_cm_id *id, int timeout);
int rc_listen(struct rdma_cm_id *id, void *addr, int backlog);
int rc_connect(struct rdma_cm_id *id, const void *data, int len, int responder_resources, int initiator_depth);
int rc_accept(struct rdma_cm_id *id, const void *data, int len, int responder_resources, int initiator_depth);
int rc_reject(struct rdma_cm_id *id, const void *data, int len);
int rc_disconnect(struct rdma_cm_id *id);
int rc_comm_established(struct rdma_cm_id *id);
// rc_address copies the local address, or the peer's if peer is not 0, to out. out must have at
// least sizeof(struct sockaddr_in6) bytes.
void rc_address(struct rdma_cm_id *id, int peer, void *out);

// Devices. rc_devices opens all devices. It returns a list that ends with NULL, or NULL on error.
// librdmacm counts the list entries of each device, and does not close a device while it has
// entries. rc_hold_context makes a list of one device and does not change the count. To get one
// hold for each device, call it for each entry of rc_devices and then free(list). rc_release_hold
// decrements the count and frees the hold.
struct ibv_context **rc_devices(int *n);
struct ibv_context **rc_hold_context(struct ibv_context *ctx);
void rc_release_hold(struct ibv_context **hold);
// rc_device_path returns the path of the device in sysfs.
const char *rc_device_path(struct ibv_context *ctx);
// rc_detach_context closes the device for the kernel: it replaces the descriptors of the context
// with /dev/null. librdmacm must still close the context. All objects of the device must be
// destroyed before.
int rc_detach_context(struct ibv_context *ctx);
// rc_is_detached returns whether rc_detach_context was called for the context.
int rc_is_detached(struct ibv_context *ctx);
// rc_port_state returns the state of a port (enum ibv_port_state), or a negative errno.
int rc_port_state(struct ibv_context *ctx, int port);
// rc_port returns the device's port that a connection id uses.
int rc_port(struct rdma_cm_id *id);
const char *rc_device_name(struct ibv_context *ctx);
int rc_is_iwarp(struct ibv_context *ctx);
int rc_query_device(struct ibv_context *ctx, struct ibv_device_attr *out);
// rc_try_window returns 0 if the device can allocate a type-2 memory window.
int rc_try_window(struct ibv_context *ctx);
// struct rc_async is an asynchronous event. Destroying its queue pair waits until the event is
// acknowledged.
struct rc_async {
	struct ibv_async_event event;
	struct ibv_qp *qp;
	int32_t kind;
	int32_t port;
};

// rc_next_async takes an asynchronous event. It returns -EAGAIN if there is none.
int rc_next_async(struct ibv_context *ctx, struct rc_async *out);
void rc_ack_async(struct rc_async *ev);

// Memory.
int rc_alloc_pd(struct ibv_context *ctx, struct ibv_pd **out);
int rc_dealloc_pd(struct ibv_pd *pd);
int rc_reg_mr(struct ibv_pd *pd, void *addr, uint64_t len, int access, struct ibv_mr **out);
int rc_dereg_mr(struct ibv_mr *mr);
int rc_alloc_mw(struct ibv_pd *pd, struct ibv_mw **out);
int rc_dealloc_mw(struct ibv_mw *mw);

// Completion queues. Each has a completion channel.
int rc_create_cq(struct ibv_context *ctx, int depth, struct ibv_comp_channel **ch, struct ibv_cq **out);
int rc_destroy_cq(struct ibv_cq *cq, struct ibv_comp_channel *ch);
// This completion queue has no completion channel.
int rc_create_cq_without_channel(struct ibv_context *ctx, int depth, struct ibv_cq **out);
int rc_destroy_cq_without_channel(struct ibv_cq *cq);
int rc_arm_cq(struct ibv_cq *cq);
// rc_take_cq_event takes an event from the channel and acknowledges it. It returns -EAGAIN if there
// is none.
int rc_take_cq_event(struct ibv_comp_channel *ch);
// struct rc_wc is a work completion.
struct rc_wc {
	uint64_t wr_id;
	uint32_t status;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t flags;
	uint32_t invalidated_rkey;
	uint32_t reserved;
};

#define RC_POLL_BATCH 32
// rc_poll_cq returns the number of completions written to out, at most RC_POLL_BATCH, or a negative
// errno.
int rc_poll_cq(struct ibv_cq *cq, struct rc_wc *out);

// Queue pairs.
int rc_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_cq *send, struct ibv_cq *recv,
                 int max_send_wr, int max_recv_wr, int max_send_sge, struct ibv_qp **out);
void rc_destroy_qp(struct rdma_cm_id *id);
int rc_fail_qp(struct ibv_qp *qp);

// struct rc_wr is a work request for the send queue. first_sge is the index of its first SGE.
struct rc_wr {
	uint64_t wr_id;
	uint64_t remote_addr;
	uint64_t bind_addr;
	uint64_t bind_len;
	struct ibv_mw *mw;
	struct ibv_mr *mr;
	uint32_t rkey;       // the peer's key, or the new key of a bind
	uint32_t invalidate;
	uint32_t opcode;     // enum ibv_wr_opcode
	uint32_t flags;      // enum ibv_send_flags
	uint32_t first_sge;
	uint32_t num_sge;
	uint32_t bind_access;
	uint32_t reserved;
};

// rc_post_send posts wrs[0..n) as one chain. scratch has space for n requests. *posted is the
// number of requests that the device accepted.
int rc_post_send(struct ibv_qp *qp, const struct rc_wr *wrs, int n, struct ibv_sge *sges,
                 struct ibv_send_wr *scratch, int *posted);
int rc_post_recv(struct ibv_qp *qp, uint64_t wr_id, void *addr, uint32_t len, uint32_t lkey);
// rc_post_marker posts a signaled empty RDMA Write to a queue pair in the error state. The device
// flushes it after the earlier requests.
int rc_post_marker(struct ibv_qp *qp, uint64_t wr_id);

#endif
